"""All SQL and all settings that only SQLite understands. The rest of the store speaks SQLAlchemy Core."""
