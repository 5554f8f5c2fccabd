"""Locks: one holder at a time, and what is said where there can be none."""

import pytest

from specvocab_model.config import ConfigError
from specvocab_model.files import exclusive


def test_a_lock_has_one_holder_and_is_free_after_it(tmp_path):
    with exclusive(tmp_path / "run/lock", "busy"), pytest.raises(ConfigError, match=r"^busy$"), \
            exclusive(tmp_path / "run/lock", "busy"):
        pytest.fail("the lock was given twice")
    with exclusive(tmp_path / "run/lock", "busy"):
        pass


@pytest.mark.parametrize("blocked", ["run", "run/lock"])
def test_a_lock_that_cannot_be_opened_is_named(blocked, tmp_path):
    if blocked == "run":
        (tmp_path / "run").touch()
    else:
        (tmp_path / "run/lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run/lock cannot be opened: .*; see that its folder"), \
            exclusive(tmp_path / "run/lock", "busy"):
        pass
