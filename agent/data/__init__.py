"""Facts that are data, not code: YAML files that a site can override. Read only when something asks for them."""
