"""Locks: one holder at a time, and what is said where there can be none. What tells that files have changed."""

import os

import pytest

from specvocab_model import files
from specvocab_model.config import ConfigError
from specvocab_model.files import exclusive, listing


def test_a_lock_has_one_holder_and_is_free_after_it(tmp_path):
    with exclusive(tmp_path / "run/lock", "busy"), pytest.raises(ConfigError, match=r"^busy$"), \
            exclusive(tmp_path / "run/lock", "busy"):
        pytest.fail("the lock was given twice")
    with exclusive(tmp_path / "run/lock", "busy"):
        pass
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.parametrize("another_came", [False, True])
def test_a_lock_that_was_removed_while_one_waited_for_it_is_none(another_came, tmp_path, monkeypatch, capsys):
    path, tries = tmp_path / "lock", []

    def flock(file, how):
        tries.append(how)
        if len(tries) == 1:
            raise BlockingIOError
        if len(tries) == 2:  # the holder ends here
            path.unlink()
            if another_came:
                path.touch()

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with exclusive(path, "waiting", wait=True) as held:
        assert len(tries) == 3 and os.path.samestat(path.stat(), os.fstat(held))
    assert capsys.readouterr().out == "waiting\n"


@pytest.mark.parametrize("blocked", ["run", "run/lock"])
def test_a_lock_that_cannot_be_opened_is_named(blocked, tmp_path):
    if blocked == "run":
        (tmp_path / "run").touch()
    else:
        (tmp_path / "run/lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run/lock cannot be opened: .*; see that its folder"), \
            exclusive(tmp_path / "run/lock", "busy"):
        pass


def test_a_listing_tells_what_has_changed_and_survives_links_that_lead_nowhere(tmp_path):
    assert listing(tmp_path / "nowhere") == []
    (tmp_path / "file").write_text("one")
    assert listing(tmp_path / "file") == listing(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    before = listing(tmp_path)
    assert [(name, size) for name, size, _ in before] == [(str(tmp_path / "file"), 3)]
    (tmp_path / "file").write_text("four")
    assert listing(tmp_path) != before
