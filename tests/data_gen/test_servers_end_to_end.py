"""Data from a server: the rows of the transformers engine, also when server and command are killed; real servers."""

import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from transformers import LlamaConfig

from data_gen.engines import OpenAIEngine, Reach, SamplingParams, TransformersEngine, VllmEngine
from data_gen.shards import load_rows
from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.target import Target
from tests.data_gen.runs import ENVIRONMENT, FOLDERS, MAIN, contents, overrides, run_here, write_inputs
from tests.data_gen.servers.completions import MODEL_NAME, completion_server
from tests.data_gen.servers.faulty_proxy import ANSWERS, BREAKAGES, FaultyProxy, free_port
from tests.tiny import EOS_IDS, PAD_ID, TOKENIZER_LENGTH, random_model, save_target, tiny_target_config

VLLM = os.environ.get("SPECVOCAB_TEST_VLLM") or shutil.which("vllm")
SGLANG = os.environ.get("SPECVOCAB_TEST_SGLANG")
SGLANG_STUBS = Path(__file__).parents[1] / "serving/stubs"  # for kernels that need a GPU
TRANSFORMERS = os.environ.get("SPECVOCAB_TEST_TRANSFORMERS_SERVE")
STARTUP_S = 300
GREEDY = ("generation.magpie_prompts=0", "generation.temperature=0", "generation.max_new_tokens=12")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="module")
def server(root):
    with completion_server(root / "target") as url:
        yield url


def arguments(root, name: str, url: str) -> list[str]:
    return overrides(root, name, *GREEDY, "generation.engine=openai", f"generation.base_urls=[{url}]",
                     f"generation.served_model={MODEL_NAME}", "generation.server_concurrency=3",
                     "generation.server_timeout=1.0")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_rows_and_files_do_not_depend_on_faults_or_kills(root, server):
    run_here(arguments(root, "whole", server))
    run_here(overrides(root, "here", *GREEDY))
    for folder in FOLDERS[1:]:
        rows = [load_rows(root / run / folder).to_list() for run in ("whole", "here")]
        assert rows[0] == rows[1] and rows[0], "a server's rows are those of the target in this process"

    dice = random.Random(0)
    spoilt = [*ANSWERS, *BREAKAGES]
    faults = iter(lambda: dice.choice([*[None] * 3 * len(spoilt), *spoilt]), "never")
    with FaultyProxy(server, faults) as proxy:
        command = [sys.executable, str(MAIN), *arguments(root, "killed", proxy.url), "generation.server_attempts=50"]
        for kill_after in (3, 9):  # requests of this start; the third start is left alone
            asked, process = proxy.num_asked, subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
            while proxy.num_asked < asked + kill_after and process.poll() is None:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
        run_here([*arguments(root, "killed", proxy.url), "generation.server_attempts=50"])
    assert contents_of(root, "killed") == contents_of(root, "whole")


def contents_of(root, run: str) -> dict[str, bytes]:
    (root / run / FOLDERS[0]).mkdir(exist_ok=True)  # no prompts were invented
    return {name: content for name, content in contents(root / run).items() if not name.endswith(".tmp")}


@contextmanager
def program(command: list[str], environment: dict[str, str], port: int):
    """A server in a process of its own, once it listens on ``port``; one that does not says why."""
    with NamedTemporaryFile() as log:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            deadline = time.monotonic() + STARTUP_S
            while not is_open(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    lines = Path(log.name).read_text(errors="replace").splitlines()
                    pytest.fail(f"{shlex.join(command)} did not start: " + "\n".join(["", *lines[-30:]]), pytrace=False)
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory) -> Target:
    """A tiny target whose heads have 64 dimensions, which vLLM's attention asks for."""
    config = LlamaConfig(
        vocab_size=TOKENIZER_LENGTH + 17, hidden_size=128, intermediate_size=256, num_hidden_layers=8, head_dim=64,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024, pad_token_id=PAD_ID,
        bos_token_id=None, eos_token_id=list(EOS_IDS), tie_word_embeddings=True)
    folder = save_target(random_model(config), tmp_path_factory.mktemp("wide") / "target")
    return Target.load(tiny_target_config(folder, "llama"), device="cpu")


def openai_engine(target: Target, url: str, model: str) -> OpenAIEngine:
    reach = Reach(concurrency=16, timeout_s=60, attempts=3, patience_s=60, headers={})
    return OpenAIEngine([url], model=model, spec=target.spec, tokenizer=target.tokenizer, min_context=64, reach=reach)


def assert_writes_what_the_target_writes(target: Target, url: str) -> None:
    shared = [37 * place % 256 for place in range(500)]  # two prompts that prefix caching takes for one at first
    prompts = [[1 + number, 50, 7 * number % 256, 99] for number in range(10)] + [[*shared, 1, 2], [*shared, 3, 4]]
    engine = openai_engine(target, url, MODEL_NAME)
    for stops in (EOS_IDS, ()):
        params = SamplingParams(max_new_tokens=40, stop_token_ids=stops)
        assert dict(engine.generate(prompts, params, seed=0)) == dict(
            TransformersEngine(target, batch_tokens=1).generate(prompts, params, seed=0))


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="no `vllm` on the PATH, and SPECVOCAB_TEST_VLLM names none")
def test_vllm_serve_writes_what_the_target_writes(wide_target):
    port = free_port()
    command = [VLLM, "serve", wide_target.spec.name, "--served-model-name", MODEL_NAME, "--host", "127.0.0.1",
               "--port", str(port), "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    with program(command, {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}, port) as url:
        assert_writes_what_the_target_writes(wide_target, url)


@pytest.mark.slow
@pytest.mark.skipif(SGLANG is None, reason="SPECVOCAB_TEST_SGLANG names no python of .venv-sglang")
def test_sglang_writes_what_the_target_writes(wide_target):
    port = free_port()
    command = [SGLANG, "-m", "sglang.launch_server", "--model-path", wide_target.spec.name, "--served-model-name",
               MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--context-length", "1024",
               "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192"]
    with program(command, {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SGLANG_STUBS)}, port) as url:
        assert_writes_what_the_target_writes(wide_target, url)


@pytest.mark.slow
@pytest.mark.skipif(TRANSFORMERS is None, reason="SPECVOCAB_TEST_TRANSFORMERS_SERVE names no `transformers` program "
                                                 "of an environment with transformers[serving]")
def test_transformers_serve_is_refused_because_it_takes_no_ids(wide_target, tmp_path):
    repository = tmp_path / "hub" / "models--tiny--wide"  # it lists the hub's cache, and nothing else
    shutil.copytree(wide_target.spec.name, repository / "snapshots" / "0")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    port = free_port()
    command = [TRANSFORMERS, "serve", "tiny/wide", "--host", "127.0.0.1", "--port", str(port)]
    with program(command, {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, port) as url, pytest.raises(
            ConfigError, match=r"cannot continue token ids \(HTTP 422: .*Unexpected fields.*return_token_ids"):
        openai_engine(wide_target, url, "tiny/wide")


@pytest.mark.skipif(VLLM is not None, reason="vLLM is installed")
def test_the_vllm_engine_says_how_to_install_it():
    with pytest.raises(ConfigError, match="needs vLLM: `pip install vllm`, or start `vllm serve` elsewhere"):
        VllmEngine(TargetConfig(model="x"), vocab_size=1, max_context=1)
