"""An AutoGen team that solves word problems with a calculator, a small world for it, and a tiny model that learns."""
