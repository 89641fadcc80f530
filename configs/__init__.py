"""Ships the YAML configs as `oval_adapters.configs`; `oval_adapters.load_config` reads them."""
