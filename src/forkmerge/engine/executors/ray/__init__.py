"""Calls on a Ray cluster; Ray itself is imported only when one is joined or started."""
