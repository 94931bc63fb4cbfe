#!/bin/sh
# Rendered by `rollart infra render --target ray` for cluster fleet: change the spec, not this.
set -eu
export RAY_AUTH_MODE=token
test -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" || export RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token"
export RAY_health_check_initial_delay_ms=1000
export RAY_health_check_period_ms=1000
export RAY_health_check_timeout_ms=2000
export RAY_health_check_failure_threshold=3
exec ray start --head --port=6380 --num-cpus=0 --num-gpus=0 --block
