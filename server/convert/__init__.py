"""Requests of other protocols → chat requests: pure functions, no HTTP.

What goes wrong with the chat request is told in the words of the request that the client sent.
"""
