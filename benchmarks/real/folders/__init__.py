"""Ordinary folders of real models and real text, made from packages of the registries."""
