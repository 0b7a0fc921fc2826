#!/bin/sh
# Makes the certificates of the TLS tests: self-signed, for localhost, good from 2020 to 2119 whatever the clock
# says, worth nothing.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >ca.cnf <<'CNF'
[ca]
default_ca = test
[test]
new_certs_dir = .
database = index
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = leaf
[any]
commonName = supplied
[leaf]
basicConstraints = critical,CA:FALSE
subjectAltName = DNS:localhost,IP:127.0.0.1
CNF
for name in a b; do
    : >index
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=test $name" \
        -keyout "$here/$name.key" -out "$name.csr"
    openssl ca -batch -selfsign -notext -config ca.cnf -startdate 20200101000000Z -enddate 21191231000000Z \
        -keyfile "$here/$name.key" -in "$name.csr" -out "$here/$name.pem"
done
