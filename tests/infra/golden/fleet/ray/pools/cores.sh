#!/bin/sh
# Rendered by `rollart infra render --target ray` for cluster fleet: change the spec, not this.
set -eu
export RAY_AUTH_MODE=token
test -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" || export RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token"
: "${RAY_HEAD:?the address of the head, like 10.0.0.1:6379}"
exec ray start --address="$RAY_HEAD" --labels pool=cores,device=cpu,instance_type=m7i.8xlarge,region=us-east-1 --num-cpus=32 --num-gpus=0 --block
