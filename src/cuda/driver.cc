#include "cuda/driver.h"
