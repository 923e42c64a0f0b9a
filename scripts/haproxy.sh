#!/bin/sh
# HAProxy for `make serve HAPROXY=1`. In Ray's configuration, HAProxy listens for its metrics and its statistics on
# every address. This binds these two ports to the loopback address, and becomes HAProxy ($CFG_SERVE_HAPROXY).
set -e
ports="$RAY_SERVE_HAPROXY_METRICS_PORT|$RAY_SERVE_HAPROXY_STATS_PORT"
for argument in "$@"; do
    if [ "$previous" = -f ]; then
        sed -i -E "s/^( *bind )\\*?:($ports)\$/\\1127.0.0.1:\\2/" "$argument"
    fi
    previous=$argument
done
exec "$CFG_SERVE_HAPROXY" "$@"
