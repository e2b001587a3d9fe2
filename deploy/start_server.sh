#!/usr/bin/env bash
# Serve deploy/serve.yaml in the background on the head; a server that runs already is stopped first.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build

pid_file=build/server.pid
old=$(cat "$pid_file" 2>/dev/null || true)
# A number left by an earlier boot may belong to another program by now.
if [ -n "$old" ] && grep -qs kvferry "/proc/$old/cmdline"; then
    kill -TERM "$old"
    for _ in $(seq 60); do
        kill -0 "$old" 2>/dev/null || break
        sleep 1
    done
fi
nohup .venv/bin/kvferry serve deploy/serve.yaml >build/server.log 2>&1 </dev/null &
echo $! >"$pid_file"
echo "kvferry serve runs as process $!; its output is in $PWD/build/server.log"
