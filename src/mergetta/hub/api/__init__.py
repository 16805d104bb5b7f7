"""The routes of /v1."""

from mergetta.hub.api import bundles, devices, experts, families, operation, tokens

ROUTERS = (
    operation.open_routes,
    operation.router,
    families.router,
    experts.router,
    bundles.router,
    bundles.readers,
    devices.router,
    tokens.router,
)
