"""The Grafana dashboard, deploy/grafana/cfg-serve.json.

request_panels.py and engine_panels.py have the panels. `$instance` and the datasource are variables
of the dashboard.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_panels
import request_panels
from dashboard_queries import Panel

FILE = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "cfg-serve.json"

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, STAT_HEIGHT = 24, 7, 4


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in (request_panels.ROWS | engine_panels.ROWS).items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        top += 1
        columns = (
            len(row) if row[0].is_stat else 3 if len(row) % 3 == 0 or len(row) > 4 else len(row)
        )
        width = WIDTH // columns
        height = STAT_HEIGHT if row[0].is_stat else HEIGHT
        for i, panel in enumerate(row):
            place = {
                "x": width * (i % columns),
                "y": top + height * (i // columns),
                "w": width,
                "h": height,
            }
            panels.append({"id": len(panels) + 1, "gridPos": place, **_body(panel)})
        top += height * -(-len(row) // columns)
    return {
        "uid": "cfg-serve",
        "title": "cfg-serve",
        "description": "Classifier-free guidance serving. Written by make pages.",
        "tags": ["cfg-serve", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_datasource(), _instance()]},
        "panels": panels,
    }


def _body(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above})
    limits = {"min": 0} if panel.at_most is None else {"min": 0, "max": panel.at_most}
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 25 if panel.stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    shape = {} if panel.is_stat else {"custom": custom}
    return {
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                **limits,
                **shape,
                "color": {"mode": "thresholds" if panel.is_stat else "palette-classic"},
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
                "range": True,
            }
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.is_stat:
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
    }


def _instance() -> dict[str, Any]:
    query = "label_values(cfg_serve_open_requests, instance)"
    return {
        "name": "instance",
        "label": "Server",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "instance"},
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "allValue": ".*",
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "sort": 1,
    }


def text() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"
