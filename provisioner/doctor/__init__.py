"""Why a server does not do what it should: checks as data, each with evidence and what to run next."""
