"""Commands of jaxpost; installed as jaxpost.launch."""
