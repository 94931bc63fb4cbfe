"""The suite of published figures: its rows keep their order and sign."""
