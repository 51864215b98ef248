"""Pydantic models of what goes over HTTP, one file per endpoint."""
