"""Other people's trainers: each module takes one framework in."""
