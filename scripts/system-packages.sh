#!/usr/bin/env bash
# Installs the programs that tests need from the system: bubblewrap, Chromium, PostgreSQL, a C compiler.
# As root on Debian it installs them; elsewhere it says what is missing, and those tests skip.
set -euo pipefail

missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v chromium >/dev/null || missing+=(chromium)
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || missing+=(postgresql)
echo '#include <string.h>' | cc -E - >/dev/null 2>&1 || missing+=(gcc libc6-dev)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "missing system packages: ${missing[*]} (the tests that need them will be skipped)" >&2
fi
