"""All settings: each is declared once (`tree`), and what excludes what is one table (`rules`)."""
