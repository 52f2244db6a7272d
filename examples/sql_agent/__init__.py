"""A LangGraph that answers questions with SQL, a small world to try it in, and a tiny model that learns there."""
