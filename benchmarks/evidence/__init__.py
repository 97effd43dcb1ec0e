"""Training runs at sizes and with tuning that count; `docs/evidence.md` is their protocol."""
