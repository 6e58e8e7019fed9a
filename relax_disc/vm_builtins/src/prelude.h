/*!
 * \file prelude.h
 * \brief What most sources include, for the compiler to read once (precompiled).
 *
 * Each source includes what it needs by itself, and compiles without this.
 */
#pragma once

#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>
