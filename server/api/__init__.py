"""HTTP endpoints, one module each; a module exposes `router(...)`, which receives its dependencies."""
