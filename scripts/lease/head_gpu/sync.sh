# sync.sh NEW [OLD]: the kernels and tests of two commits, beside bench.py. Run it where the repository's history is.
set -e
new=$1 old=${2:-HEAD} root=$(git rev-parse --show-toplevel)
cd "$(dirname "${BASH_SOURCE[0]}")"
rm -rf old new tests; mkdir -p old new tests
git -C "$root" archive "$old" kernels/specvocab_kernels | tar x --strip-components=1 -C old
git -C "$root" archive "$new" kernels/specvocab_kernels | tar x --strip-components=1 -C new
git -C "$root" archive "$new" tests/kernels/test_vocab_head.py | tar x --strip-components=2 -C tests
cat > tests/conftest.py <<'C'
import pytest, torch
def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
@pytest.fixture(scope="session")
def device():
    return torch.device("cuda")
C
