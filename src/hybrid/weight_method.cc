#include "hybrid/weight_method.h"
