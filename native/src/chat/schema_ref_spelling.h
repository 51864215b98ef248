// How references of a JSON schema are spelled.

#pragma once

#include "json.h"
#include "schema_report.h"

namespace s2moe {

/*
 * Gives every reference the one spelling that llama.cpp follows: the names on the way from the root, as they are, with
 * slashes between. A target that is no definition of the root (the root itself among them), or has a slash in its name,
 * is copied into the root's $defs. So every schema is reached on one way, and preparing one moves no other.
 *
 * Throws failure with the place of a reference that leads nowhere, to what is no schema, or out of the document.
 */
void spell_refs(common_json & root, schema_report & report);

} // namespace s2moe
