"""Which form each matrix gets: errors, costs, and the cheapest plan."""
