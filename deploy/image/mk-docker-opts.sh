#!/bin/sh
exec /opt/bin/flannelctl docker-opts "$@"
