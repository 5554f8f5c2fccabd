"""Tests that need an engine; `bash scripts/test_serving.sh` runs them, each in the engine's own environment."""

from importlib.util import find_spec

collect_ignore_glob = [f"test_{engine}_*.py" for engine in ("vllm", "sglang") if find_spec(engine) is None]
