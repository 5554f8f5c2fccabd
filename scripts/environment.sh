# Sourced by the other scripts: makes or reuses .venv at the repository root and installs the package into it.
#   install_environment            the package
#   install_environment dev        and the "dev" extra
# Sets PYTHON to the environment's interpreter and changes to the repository root.

# The newest torch that every test runs with. The package itself admits the next one, which engines pin.
TORCH="torch<2.14"

# Waiting OpenMP threads sleep soon instead of spinning: about as fast on an idle machine, and where another program takes
# part of the cores several times faster (docs/DESIGN_NOTES.md). Also for who activates the environment.
spin='export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000}'
eval "$spin"

fail() {
  echo "error: $*" >&2
  exit 1
}

# The newest Python on the PATH for which every dependency has wheels; a newer one only if there is no other.
find_python() {
  local name
  for name in python3.13 python3.12 python3.11 python3 python; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  fail "Python 3.11 or newer is needed and none is on the PATH (python3 is $(python3 --version 2>&1 || true)); install it"
}

make_venv() {
  local python
  python=$(find_python)
  echo "making .venv with $("$python" --version)"
  "$python" -m venv --help >/dev/null 2>&1 ||
    fail "$python has no venv module; install it (Debian, Ubuntu: apt-get install python3-venv)"
  rm -rf .venv
  "$python" -m venv .venv ||
    fail "$python cannot make a virtual environment; install its venv package (Debian, Ubuntu: apt-get install python3-venv)"
  echo "$spin" >>.venv/bin/activate
}

install_environment() {
  local extra=${1:-} wanted installed
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  PYTHON=$PWD/.venv/bin/python
  "$PYTHON" -m pip --version >/dev/null 2>&1 || make_venv
  # One line per finished installation, so that a second run, or one with fewer extras, installs nothing.
  wanted="$(cksum <pyproject.toml) $PWD $extra"
  installed=.venv/specvocab-installed
  if ! grep -qsxF "$wanted" "$installed"; then
    echo "installing (the first time takes minutes: PyTorch is large)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}" "$TORCH" ||
      fail "the installation failed; the lines above say why"
    echo "$wanted" >>"$installed"
  fi
}
