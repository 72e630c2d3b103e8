"""Standard input and output as the commands use them, and how streaming answers are displayed."""
