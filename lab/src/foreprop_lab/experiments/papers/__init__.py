"""The papers' tables and figures that no lab of ours can have, from the simulator."""
