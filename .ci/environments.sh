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

# make_environment NAME PYTHON PACKAGE ...: install packages unless it was done before; print the interpreter's path.
# uv installs: it needs seconds to find versions that fit, where pip needs minutes, and links files that environments share.
make_environment() {
  local folder=$environments/$1 python=$2 made
  shift 2
  made="$("$python" --version) $* $(cat .ci/lowest.txt | cksum)"
  if [[ $(cat "$folder/.made" 2>/dev/null) != "$made" ]]; then
    echo "making $folder" >&2
    if [[ ! -e $environments/uv/.made ]]; then
      python3 -m venv "$environments/uv" 1>&2 || python3 -m virtualenv "$environments/uv" 1>&2 || return 1
      "$environments/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv 1>&2 || return 1
      touch "$environments/uv/.made"
    fi
    rm -rf "$folder"
    "$environments/uv/bin/uv" venv --quiet --python "$python" "$folder" 1>&2 || return 1
    "$environments/uv/bin/uv" pip install --quiet --python "$folder/bin/python" "$@" 1>&2 || return 1
    echo "$made" > "$folder/.made"
  fi
  echo "$folder/bin/python"
}
