"""How a program is kept from reaching anything but its channel, one module a defence."""
