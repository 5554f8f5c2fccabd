"""Every experiment composes and passes the schema, with every choice of every group."""

from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specvocab_model.config import CONFIG_DIR, NODES, STRATEGIES, Config, parse_config, register_schemas

REPOSITORY = Path(CONFIG_DIR).parent
EXPERIMENTS = sorted(path.stem for path in Path(CONFIG_DIR, "experiment").glob("*.yaml"))
REQUIRED = {
    "quickstart", "smollm2_135m", "gemma3_270m", "qwen3_4b", "qwen3_8b", "olmo2_1b", "olmo2_7b", "llama31_8b",
}


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in Path(CONFIG_DIR, group).glob("*.yaml"))


def parse(*overrides: str) -> Config:
    register_schemas()
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        return parse_config(compose("config", overrides=list(overrides)))


@cache
def plain(experiment: str) -> Config:
    """The experiment without overrides."""
    return parse(f"+experiment={experiment}")


def test_required_experiments_exist():
    assert set(EXPERIMENTS) >= REQUIRED


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_composes_with_every_strategy_and_tracker(experiment):
    for strategy, backend in zip(choices("distributed"), cycle(choices("tracking"))):
        config = parse(f"+experiment={experiment}", f"distributed={strategy}", f"tracking={backend}")
        assert (config.distributed.strategy, config.tracking.backend) == (strategy, backend)


@pytest.mark.parametrize("group", sorted(set(NODES) - {"target"}))
def test_every_choice_of_every_group_composes(group):
    for choice in choices(group):
        parse("+experiment=quickstart", f"{group}={choice}")


@pytest.mark.parametrize("target", choices("target"))
def test_every_target_composes(target):
    assert parse("+experiment=quickstart", f"target={target}").target.model.count("/") == 1


def test_every_strategy_has_a_file():
    assert set(choices("distributed")) == set(STRATEGIES)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_conventions(experiment):
    """It names itself, starts with its command, and shares no folder with another."""
    text = Path(CONFIG_DIR, "experiment", f"{experiment}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    command = text.splitlines()[1]
    assert command.endswith((f"+experiment={experiment}", f"scripts/{experiment}.sh"))
    config = plain(experiment)
    assert config.run_name == experiment
    assert config.output_dir == f"outputs/{experiment}"
    assert (config.data.train_path, config.data.validation_path) == (
        f"data/{experiment}/train", f"data/{experiment}/validation")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_holds_only_differences(experiment):
    """No value repeats what the groups or the schema say already."""
    own = OmegaConf.load(Path(CONFIG_DIR, "experiment", f"{experiment}.yaml"))
    groups = [f"{key.split('/')[-1]}={value}" for entry in own.pop("defaults") for key, value in entry.items()]
    register_schemas()
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        base = compose("config", overrides=groups)
    for group in set(own) & set(NODES):
        for key, value in OmegaConf.to_container(own[group], resolve=False).items():  # one machine's word is no default
            default = None if OmegaConf.is_missing(base[group], key) else base[group][key]
            assert value != default, f"{group}.{key}={value} is the default already"


@pytest.mark.parametrize(("fast", "dtype", "mixed_precision"), [(True, "bfloat16", "bf16"), (False, "float32", "no")])
def test_the_quickstart_computes_in_what_the_machine_is_fast_at(monkeypatch, fast, dtype, mixed_precision):
    monkeypatch.setattr("specvocab_model.config.has_fast_bf16", lambda: fast)
    config = parse("+experiment=quickstart")
    assert (config.target.dtype, config.trainer.mixed_precision) == (dtype, mixed_precision)


def test_interpolation_follows_the_run_name():
    config = parse("+experiment=quickstart", "run_name=other")
    assert config.output_dir == "outputs/other"
    assert config.data.train_path == "data/quickstart/train"  # a second run trains on the same data


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_prompt_files_are_shipped(experiment):
    config = plain(experiment)
    assert config.generation.prompt_files or config.generation.magpie_prompts
    for name in (*config.generation.prompt_files, config.eval.prompts):
        assert (REPOSITORY / name).is_file()
