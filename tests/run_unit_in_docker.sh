#!/usr/bin/env bash
# Run tests/run_unit.sh in a container: CONTAINER=image tests/run_unit_in_docker.sh [arguments of run_unit.sh]
#
#   GPUS=all          passed to docker as --gpus (default: all if nvidia-smi finds a GPU, else none)
#   SHM_SIZE=16g      shared memory, which Ray's object store and NCCL use
#   MOUNTS="a:b,c:d"  further mounts
#   HF_HOME           mounted if it exists; HF_TOKEN, WANDB_API_KEY and CUDA_VISIBLE_DEVICES are passed on
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -n "${CONTAINER:-}" ]] || {
  echo "${0##*/}: set CONTAINER to the image to run in, as in CONTAINER=my/image:tag $0" >&2
  exit 2
}
command -v docker >/dev/null || {
  echo "${0##*/}: docker is not on PATH" >&2
  exit 2
}
# `docker run` would exit with 125, which to a bisect says that the commit cannot be tested; 137 says that the machine failed.
docker info >/dev/null 2>&1 || {
  echo "${0##*/}: the Docker daemon does not answer, see: docker info" >&2
  exit 137
}

gpus=${GPUS:-}
if [[ -z "$gpus" ]] && command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  gpus=all
fi

# Without a name of its own in the image a user has no home to write caches to.
command=(docker run --rm --init --shm-size "${SHM_SIZE:-16g}" --ulimit memlock=-1
  --user "$(id -u):$(id -g)" --env HOME=/tmp
  --volume "$PWD:$PWD" --workdir "$PWD")
[[ -z "$gpus" || "$gpus" == none ]] || command+=(--gpus "$gpus")
[[ ! -d "${HF_HOME:-}" ]] || command+=(--volume "$HF_HOME:$HF_HOME" --env HF_HOME)
for variable in HF_TOKEN WANDB_API_KEY CUDA_VISIBLE_DEVICES TESTS GPUS_REQUIRED; do
  [[ -z "${!variable:-}" ]] || command+=(--env "$variable")
done
IFS=", " read -ra mounts <<<"${MOUNTS:-}"
for mount in ${mounts[@]+"${mounts[@]}"}; do
  command+=(--volume "$mount")
done
# The environment of this machine is not that of the image.
command+=(--env "PYTHON=${CONTAINER_PYTHON:-python3}")
[[ ! -t 0 ]] || command+=(--interactive --tty)

exec "${command[@]}" "$CONTAINER" bash "${SCRIPT:-tests/run_unit.sh}" "$@"
