"""What foreprop itself costs: `foreprop bench`, and scripts for the documents' tables."""
