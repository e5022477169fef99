"""Trainers that are correct by construction, each written in its own hand: no check may accuse one of them."""
