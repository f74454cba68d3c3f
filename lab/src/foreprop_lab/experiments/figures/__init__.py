"""The paper's figures: measured, drawn, and a page of all."""
