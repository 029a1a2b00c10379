"""From (prompt, response) to a score: verifiers by name, and the pool of killable processes that runs them."""
