"""Layers cut over several devices by their features, and the differentiable collectives between the parts."""
