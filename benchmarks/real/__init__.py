"""Real trained models: fetched by package name, proved against their originals, and measured."""
