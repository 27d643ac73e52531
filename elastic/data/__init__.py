"""Loads samples so that each counts once per epoch in what is committed. Names are loaded at first use."""
