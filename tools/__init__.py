"""What writes the tables of the documentation. No part of the installed package."""
