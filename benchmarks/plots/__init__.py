"""Pictures of results, as SVG. The same results give the same bytes."""
