# Appends the SHA-256 of a library to it, in hexadecimal. The system's loader ignores data after the sections; ours
# detects a damaged file by it, which the system's would map, and crash later.
file(SHA256 ${FILE} checksum)
file(APPEND ${FILE} ${checksum})
