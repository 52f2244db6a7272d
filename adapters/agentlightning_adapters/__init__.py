"""Adapters: one file per framework. Each opens spans where the framework's own hooks say who is speaking."""
