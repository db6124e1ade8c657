# Sourced by the scripts beside it: environments with other versions than those of `make test`.
# They hold up to 5 GB each, so they are kept outside the checkout and made once.
environments=${PROTONET_ENVIRONMENTS:-${XDG_CACHE_HOME:-$HOME/.cache}/protonet-environments}

# find_python VERSION ...: print the path of the first installed Python, such as 3.12; 1 if there is none
find_python() {
  local version candidate
  for version in "$@"; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
      if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
        command -v "$candidate"
        return
      fi
    done
  done
  return 1
}

# make_environment NAME PYTHON PIP_ARGUMENT ...: install packages unless it was done before; print the interpreter's path
make_environment() {
  local folder=$environments/$1 python=$2 made
  shift 2
  made="$("$python" --version) $* $(cat -- $(printf '%s\n' "$@" | grep '\.txt$') /dev/null | cksum)"
  if [[ $(cat "$folder/.made" 2>/dev/null) != "$made" ]]; then
    mkdir -p "$environments"
    rm -rf "$folder"
    echo "making $folder" >&2
    "$python" -m venv "$folder" 1>&2 || "$python" -m virtualenv "$folder" 1>&2 || return 1
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 1>&2 || return 1
    echo "$made" > "$folder/.made"
  fi
  echo "$folder/bin/python"
}
