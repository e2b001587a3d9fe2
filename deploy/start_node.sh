#!/usr/bin/env bash
# Start Ray on this node: start_node.sh head | start_node.sh worker HEAD_ADDRESS
#
# The node gets one unit of a custom resource named after its role in roles.txt, so that placement can
# ask for a prefill node or a decode node.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?say head or worker}
role=
for name in $(hostname -I 2>/dev/null) "$(hostname)"; do
    role=$(awk -v name="$name" '$1 == name { print $2; exit }' deploy/roles.txt)
    [ -n "$role" ] && break
done
if [ -z "$role" ]; then
    echo "This node ($(hostname), $(hostname -I 2>/dev/null)) has no line in deploy/roles.txt" >&2
    exit 1
fi

.venv/bin/ray stop
case $kind in
head)
    exec .venv/bin/ray start --head --port=6379 --resources="{\"$role\": 1}" \
        --autoscaling-config="$HOME/ray_bootstrap_config.yaml"
    ;;
worker)
    exec .venv/bin/ray start --address="${2:?say the address of the head}:6379" --resources="{\"$role\": 1}"
    ;;
*)
    echo "start_node.sh: $kind is neither head nor worker" >&2
    exit 2
    ;;
esac
