// Pointers into a JSON document, as $ref has them: RFC 6901 in the fragment of a URI.

#pragma once

#include <optional>
#include <string>
#include <vector>

namespace s2moe {

// The names on the way from the root to what a reference points at: none for "#". Nothing if it is no pointer into the
// document that it stands in.
std::optional<std::vector<std::string>> read_pointer(const std::string & ref);

// The pointer to what lies behind these names.
std::string pointer_to(const std::vector<std::string> & names);

// A name as part of a pointer.
std::string escape_name(const std::string & name);

} // namespace s2moe
