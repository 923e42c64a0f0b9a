#!/bin/sh
# HAProxy for `make serve HAPROXY=1`. In Ray's configuration, HAProxy listens for its metrics and its statistics on
# every address, and waits for the head of a request for an hour. This binds these two ports to the loopback address,
# lets a head take 10 s, and becomes HAProxy ($CFG_SERVE_HAPROXY).
set -e
ports="$RAY_SERVE_HAPROXY_METRICS_PORT|$RAY_SERVE_HAPROXY_STATS_PORT"
for argument in "$@"; do
    if [ "$previous" = -f ]; then
        sed -i -E "s/^( *bind )\\*?:($ports)\$/\\1127.0.0.1:\\2/" "$argument"
        sed -i -E "0,/^( *)timeout client .*/s//&\\n\\1timeout http-request 10s/" "$argument"
    fi
    previous=$argument
done
exec "$CFG_SERVE_HAPROXY" "$@"
